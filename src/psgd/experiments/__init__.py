"""The laboratory: the paper's experiments, one file each, and what runs and reports them."""
