"""From files of text to tokens on the disk: documents, shards, tokenisers, the processes that make them."""
