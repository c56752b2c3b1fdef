"""The pure protocol core of a session: commands and events in, instructions out.

It has no clock, thread, socket or device.
"""
