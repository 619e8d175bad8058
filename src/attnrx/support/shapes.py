"""The axis names in shape annotations, which have the same meaning in all modules.

    batch       images of a batch              width       embedding dimension of a token
    tokens      tokens of an image             heads       attention heads of a layer
    directions  rank-one terms of a head       layers      transformer blocks
    queries     query tokens                   keys        key tokens
    head_dim    value dimensions of a head     classes     outputs of the classifier
    draws       repeated random draws          images      images of a whole dataset

The tests check annotations such as `Float[Tensor, "heads directions"]` at run time. Outside the tests, they are not
checked.
"""

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

__all__ = ["Bool", "Float", "ImageBatch", "Int", "Logits", "Tensor", "TokenBatch", "UInt8"]

ImageBatch = Float[Tensor, "batch channels height width"]
TokenBatch = Float[Tensor, "batch tokens width"]
Logits = Float[Tensor, "batch classes"]
