"""`penstock chaos`: break a cluster on purpose, and judge what it promised."""
