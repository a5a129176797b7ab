"""Matrix products: matmul, its two libraries."""
