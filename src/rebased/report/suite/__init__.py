"""The page of a suite: recall against bytes of state, places, main effects, and the runs behind each number."""
