"""The parts of sessions, plans, tensors and devices that the blocking and the asyncio API share.

May import everything except the public modules.
"""
