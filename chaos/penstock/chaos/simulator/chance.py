"""What chance decides in a run, quickly: half of what a run does begins with a draw."""

from __future__ import annotations

from random import Random


class Chance(Random):
    """A Random whose ``randint`` draws the same numbers, with less around them.

    Seeds draw what they drew from a Random: so the runs of known seeds stay as they are.
    """

    def randint(self, a: int, b: int) -> int:
        """A whole number from ``a`` to ``b``, both of them included; ``a`` is not above ``b``."""
        span = b - a + 1
        assert span > 0, (a, b)
        bits = span.bit_length()
        drawn = self.getrandbits(bits)
        while drawn >= span:
            drawn = self.getrandbits(bits)
        return a + drawn
