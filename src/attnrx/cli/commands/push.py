"""attnrx push: uploads the folder of a saved model to the Hugging Face hub."""

from argparse import Namespace

import attnrx as rx
from attnrx.cli.options import Parser, add_arguments, given_arguments
from attnrx.cli.outcome import Outcome
from attnrx.support.progress import Log

SUMMARY = "upload a saved model to the Hugging Face hub, with its card and evidence"
EXAMPLE = (
    "attnrx push slim someone/slim-vit --license apache-2.0 --base-model timm/vit_tiny_patch16_224\n"
    "  afterwards hub:someone/slim-vit is the name of the model: attnrx costs hub:someone/slim-vit"
)


def add(parser: Parser) -> None:
    parser.add_argument("folder", help="a model saved by attnrx, with its card and evidence")
    parser.add_argument("repository", metavar="OWNER/NAME", help="the repository; created if missing")
    add_arguments(parser, "push_to_hub", "private", license="NAME", base_model="OWNER/NAME")


def run(arguments: Namespace, log: Log) -> Outcome:
    log(f"uploading {arguments.folder} to {arguments.repository}")
    about = given_arguments(arguments, "license", "base_model", "private")
    address = rx.push_to_hub(arguments.folder, arguments.repository, **about)
    name = f"hub:{arguments.repository}"
    return Outcome({"model": name, "address": address}, (f"model: {name}", address))
