"""CLIP and SigLIP: contrastive learning on pairs of images and texts."""
