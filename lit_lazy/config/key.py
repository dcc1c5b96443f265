"""The name of a cell."""

import hashlib
import json

from lit_lazy.config.canonical import to_dict
from lit_lazy.config.schema import RunConfig


def cell_key(config: RunConfig, fingerprint: str) -> str:
    """The name of a cell: a hash of the canonical config and of the fingerprint of the data it trains on."""
    text = json.dumps({"config": to_dict(config), "data": fingerprint}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
