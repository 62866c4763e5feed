"""`penstock chaos`: break a cluster on purpose, and judge what it promised."""

from penstock.cli.chaos.commands import app

__all__ = ["app"]
