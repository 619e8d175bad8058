"""Model families. Each family finds the attention layers in one kind of model, and describes and builds such models."""

from attnrx.vit.attention import use_backend
from attnrx.vit.models.boundary.loading import build_model, load_model, save_model
from attnrx.vit.models.boundary.stock import loading_code, stock_form
from attnrx.vit.models.boundary.working_copy import (
    Answering,
    accepting,
    answer,
    at_size_of,
    library_form,
    model_fingerprint,
    own_model,
    timed_form,
    token_run,
    working_copy,
)
from attnrx.vit.models.checkpoint import is_model_file, require_model_folder
from attnrx.vit.models.families import (
    FAMILIES,
    LIBRARIES,
    family_of,
    known_family,
    model_names,
    own_family,
    require_ordinary_weights,
)
from attnrx.vit.models.family import STATED_OUTPUTS, Family, NamedFamily, num_outputs, state_outputs_, stated_outputs
from attnrx.vit.models.input_validation import InputValidation
from attnrx.vit.models.observation_hooks import (
    ModuleCall,
    blocks_of,
    counted_by_spec,
    observing,
    observing_calls,
    observing_mlp,
    recording_blocks,
    recording_calls,
    replacing_forward,
    tokens_in,
)
from attnrx.vit.models.parts.mlp import LowRankLinear, hidden_units, rank_of
from attnrx.vit.models.parts.module_inputs import ModuleInputs
from attnrx.vit.models.parts.token_reduction import TokenReduction, TokenRun, reduction_of, require_all_tokens
from attnrx.vit.models.users.reader import Reader
from attnrx.vit.models.working.token_hooks import attach_tokens_, described_tokens, recording_tokens

__all__ = [
    "FAMILIES",
    "LIBRARIES",
    "STATED_OUTPUTS",
    "Answering",
    "Family",
    "InputValidation",
    "LowRankLinear",
    "ModuleCall",
    "ModuleInputs",
    "NamedFamily",
    "Reader",
    "TokenReduction",
    "TokenRun",
    "accepting",
    "answer",
    "at_size_of",
    "attach_tokens_",
    "blocks_of",
    "build_model",
    "counted_by_spec",
    "described_tokens",
    "family_of",
    "hidden_units",
    "is_model_file",
    "known_family",
    "library_form",
    "load_model",
    "loading_code",
    "model_fingerprint",
    "model_names",
    "num_outputs",
    "observing",
    "observing_calls",
    "observing_mlp",
    "own_family",
    "own_model",
    "rank_of",
    "recording_blocks",
    "recording_calls",
    "recording_tokens",
    "reduction_of",
    "replacing_forward",
    "require_all_tokens",
    "require_model_folder",
    "require_ordinary_weights",
    "save_model",
    "state_outputs_",
    "stated_outputs",
    "stock_form",
    "timed_form",
    "token_run",
    "tokens_in",
    "use_backend",
    "working_copy",
]  # fmt: skip
