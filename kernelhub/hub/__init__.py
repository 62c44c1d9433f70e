"""Hub: repositories as the Hub tells them; the only user of huggingface_hub.

huggingface_hub supplies the HTTP session (proxies, certificates, offline switch), the addresses of files and the stored
token. Retries, redirects and pagination are ours (`retry.py`, `transfer.py`), so that they never multiply with its own:
every request of the API goes to the configured endpoint, and the token to no other host.
"""

from kernelhub.hub.index import HubIndex

__all__ = ["HubIndex"]
