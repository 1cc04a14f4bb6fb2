"""The memory of a fit before it starts, by a copy that runs on tensors without data, its storages on a modelled allocator."""
