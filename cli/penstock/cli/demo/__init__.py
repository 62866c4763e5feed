"""`make demo`: a real access log through a cluster that loses its leader on the way."""
