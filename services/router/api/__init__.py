"""The HTTP side: dialects, streams, errors. Knows requests and answers, not how they are served."""
