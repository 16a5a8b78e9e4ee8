"""The Lie groups of the paper: one small file each, and the expressions that combine them."""
