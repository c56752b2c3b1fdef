"""HTTP servers of the daemon: uvicorn on a bound socket, heads and bodies in bounded size
and time, and statuses of errors. The gateways and the dashboard share them.

May import `auth`, `config` and `rpc`; uvicorn and Starlette are imported by those who need them.
"""
