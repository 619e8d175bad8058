"""SPOT on other datasets: a fresh head on the frozen model, beside the same head on its baseline.

Paper: SPOT: Sparsification with Attention Dynamics via Token Relevance in Vision Transformers
Table: 4
Command: attnrx reproduce spot/table4 --only vit_tiny-cifar10 --weights vit_tiny_patch16_224.safetensors
    --check 'transfer(per_class=50)' --test-images 500
Expected: SPOT 0.7 to 4.0 points above its baseline on CIFAR-100, Food-101, DTD and EuroSAT at 0.8 of 1.3 GFLOPS; every
    number is in expected.json. ViT-Tiny on CIFAR-10 and Tiny-ImageNet stands in for them and has no printed numbers
Not stated: schedule, weight decay, batch size and augmentation of the heads, and seeds
Time: a pass of the frozen models over the images, and a minute of heads; ViT-Tiny with the command above some minutes
    on one CPU core
Hardware: a CPU. SPOT itself must be trained first (spot/table1): --candidates spot=spot:0.7@4,7,10=FOLDER. DTD and
    EuroSAT are read from a folder or the hub: --only deit_tiny-dtd --data PLACE
"""

from attnrx_lab.papers.spot_transfer_tables import PROBED, transfer_recipe

RECIPE = transfer_recipe("A fresh head on other datasets", PROBED)
