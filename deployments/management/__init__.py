"""What operators do with the models of a store.

Commands (`hundredfold models ...`) and routes (`/models/...`) call the same functions.
"""
