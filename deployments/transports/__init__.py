"""How the ingress reaches tokenizer and lanes: in process for tests, by Ray handles in service."""
