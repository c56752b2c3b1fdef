"""What the blocking and the asyncio API share of sessions, plans, tensors and devices.

May import all but the public modules.
"""
