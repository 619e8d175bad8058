"""The commands, one file each: `EXAMPLE`, `add(parser)` and `run(arguments, say)`.

These files name what they need as `rx.NAME`, which is loaded when it is used: a command's help needs none of it.
"""

# The name of every command, which is also the name of its module, and what it does in one line.
COMMANDS: dict[str, str] = {
    "train": "train a model, or go on with a run that was stopped",
    "diagnose": "read the spectra and indicators of every layer and head off a model",
    "prescribe": "decide which directions and heads a model can do without",
    "plan": "share one budget out over ranks and tokens, for a target of latency, MACs, parameters or accuracy",
    "realize": "carry a prescription out, as a mask or as a smaller model",
    "verify": "collect evidence of what a candidate costs against its reference",
    "export": "write a model as a file that runs without attnrx, checked against the model",
    "push": "put a saved model on the Hugging Face hub, with its card and evidence",
    "report": "write everything that was found into one HTML page",
    "costs": "price a model in parameters and MACs, before or after a prescription",
    "compare": "compress one model in several ways, and see what each costs and loses",
    "bench": "compress one model in several ways, and time each beside the model as its library ships it",
    "sweep": "run one command over seeds, datasets and rules, and keep every number",
    "diff": "compare two diagnoses, two prescriptions or two pieces of evidence",
    "reproduce": "make a table of the paper again, from training to numbers",
    "demo": "go the whole way on one dataset, from training to a report",
}
