"""The contract that every part of Penstock shares: record batches, errors and ids."""
