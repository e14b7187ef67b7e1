"""What a trained model can do, forward only: task accuracy, perplexity of AR and other tokens, recall of facts."""
