"""The nouns: what a request, an engine's page, an event and an objective are made of."""
