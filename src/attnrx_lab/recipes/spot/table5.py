"""SPOT on corrupted images: the mean accuracy over the nineteen corruptions of ImageNet-C at severity 3.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: 5
Command: attnrx reproduce spot/table5 --only vit_tiny-c --weights vit_tiny_patch16_224.safetensors
    --data imagenette224.parquet
Expected: SPOT from 1.2 points below its baseline to 0.7 above it, at two thirds of the GFLOPS; every number is in
    expected.json. ViT-Tiny on ten classes of ImageNet stands in for them and has no printed numbers
Not stated: how the corrupted images were stored. Those here are made by this package's own corruptions (frost and
    water are not the benchmark's) and are not JPEG files
Time: nineteen passes of all models over the images: for ViT-Tiny, its 500 images and six candidates half an hour on
    one CPU core
Hardware: a CPU for ViT-Tiny; a GPU for all of ImageNet. SPOT itself must be trained first (spot/table1):
    --candidates spot=spot:0.7@4,7,10=FOLDER
"""

from attnrx_lab.papers.spot_transfer_tables import ROBUST, transfer_recipe

RECIPE = transfer_recipe("Accuracy on corrupted images, the mean over corruptions at severity 3", ROBUST)
