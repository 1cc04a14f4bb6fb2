"""The memory of a fit before it starts: a copy of it runs on tensors without data, its storages on a modelled allocator."""
