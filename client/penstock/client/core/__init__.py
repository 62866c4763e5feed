"""Pure: what producers, consumers and members decide."""
