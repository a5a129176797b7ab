"""One module or package for each family of ops, named as its folder of csrc: the public functions, and what their rows
leave to Python."""
