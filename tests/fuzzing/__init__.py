"""Random and mutated bytes for the compiled codec, built with an address sanitiser."""
