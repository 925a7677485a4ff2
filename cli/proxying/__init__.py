"""What the proxy lets through: who calls, which calls, how often. The server itself is `cli/proxy.py`."""
