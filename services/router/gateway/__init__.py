"""Identity and branch events in front of any server with an OpenAI or Anthropic API; needs no cluster of ours."""
