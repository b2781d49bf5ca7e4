"""How the ingress reaches tokenizer and encoders: in process for tests, by Ray handles in service."""
