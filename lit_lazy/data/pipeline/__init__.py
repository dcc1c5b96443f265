"""From text files to tokens on disk: documents, tokenisers, shards, worker processes."""
