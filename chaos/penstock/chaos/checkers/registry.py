"""temporary"""

from penstock.chaos.checkers.lost import *
from penstock.chaos.checkers.placed import *
from penstock.chaos.checkers.written import *


def applicable(history, evidence):
    return [
        LostWrite(),
        UnseenWrite(),
        Duplicate(),
        InconsistentOffset(),
        Reorder(),
        Phantom(),
        ErrorHonesty(),
    ]
