"""Generated stubs of the penstock.v1 protocol; regenerate with make proto."""
