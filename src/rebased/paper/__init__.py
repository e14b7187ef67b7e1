"""Every table and figure of the paper on one page: its numbers, ours from records, and a verdict each."""
