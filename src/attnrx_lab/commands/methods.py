"""The common options of the commands that compare methods."""

from attnrx.cli.options import Number, Parser, option

SHARES = Number(float, lambda kinds: kinds.each(kinds.SHARE, "shares above 0, at most 1, e.g. 0.8,0.6"), "S,S", True)


def add_methods(parser: Parser, required: bool = True) -> None:
    """Adds --methods."""
    syntax = (
        "each 'NAME=RULES [repair=STEPS] [distill=EPOCHS]', with the rules of `attnrx prescribe`, e.g. "
        "'both=qk=total_rank:{share} tokens=evit:{share}@4,7,10', where {share} stands for the share kept (a rule "
        "without a map is that of qk), or "
        "'NAME=baseline:BASELINE': svd, asvd, fwsvd or svd_llm on all linear maps, tucker or tucker_terms on the "
        "scores of all heads, or corp, snapvit, wdpruning, diffrate, torch_pruning, plan, resolution, int8, "
        "unchanged, or a function of --plugin; or 'NAME=FOLDER', a model that was trained, e.g. spot=runs/spot, or "
        "its name, e.g. smaller=timm:NAME"
    )
    option(parser, "--methods", "NAME=RULES", syntax, nargs="+", required=required)


def add_points(parser: Parser, shares: tuple[float, ...]) -> None:
    """Adds the mutually exclusive options --shares and --macs, which set the budgets for the comparison."""
    points = parser.add_mutually_exclusive_group()
    option(points, "--shares", SHARES, f"shares kept ({','.join(map(str, shares))})")
    costs = "shares of the model's MACs, e.g. 0.9,0.8,0.5: every method at the largest {share} that costs no more"
    option(points, "--macs", SHARES, costs)
