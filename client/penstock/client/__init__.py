"""The client SDK: producers, consumers and administration, sync and asyncio."""
