"""The protocol core of a session, pure: commands and events in, instructions out.

No clock, thread, socket or device.
"""
