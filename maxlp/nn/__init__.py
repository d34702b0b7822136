"""Neural-network parts that families share: layers, stacks of blocks, attention kernels."""
