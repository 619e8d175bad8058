"""Model families: locate the attention layers of each kind of model; build, load and save models by name."""

from attnrx.vit.attention import use_backend
from attnrx.vit.models.checkpoint import is_model_file, require_model_folder
from attnrx.vit.models.families import (
    FAMILIES,
    LIBRARIES,
    accepting,
    at_size_of,
    build_model,
    family_of,
    known_families,
    known_family,
    load_model,
    model_names,
    register_family,
    save_model,
)
from attnrx.vit.models.family import (
    STATED_OUTPUTS,
    Family,
    NamedFamily,
    model_fingerprint,
    num_outputs,
    require_ordinary_weights,
)
from attnrx.vit.models.input_validation import InputValidation
from attnrx.vit.models.mlp import LowRankLinear, hidden_units, rank_of
from attnrx.vit.models.module_inputs import ModuleInputs
from attnrx.vit.models.observation_hooks import (
    ModuleCall,
    blocks_of,
    counted_by_spec,
    evaluating,
    observing,
    observing_calls,
    observing_mlp,
    recording_blocks,
    recording_calls,
    replacing_forward,
)
from attnrx.vit.models.reader import Reader
from attnrx.vit.models.token_hooks import attach_tokens_, described_tokens, recording_tokens, token_run
from attnrx.vit.models.token_reduction import TokenReduction, TokenRun, reduction_of, require_all_tokens

__all__ = [
    "FAMILIES", "LIBRARIES", "STATED_OUTPUTS", "Family", "InputValidation", "LowRankLinear", "ModuleCall",
    "ModuleInputs", "NamedFamily", "Reader", "TokenReduction", "TokenRun", "accepting", "at_size_of", "attach_tokens_",
    "blocks_of", "build_model", "counted_by_spec", "described_tokens", "evaluating", "family_of", "hidden_units",
    "is_model_file", "known_families", "known_family", "load_model", "model_fingerprint", "model_names", "num_outputs",
    "observing", "observing_calls", "observing_mlp", "rank_of", "recording_blocks", "recording_calls",
    "recording_tokens", "reduction_of", "register_family", "replacing_forward", "require_all_tokens",
    "require_model_folder", "require_ordinary_weights", "save_model", "token_run", "use_backend",
]  # fmt: skip
