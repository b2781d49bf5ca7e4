"""Operations on the models of a store, for operators.

Commands (`hundredfold models ...`) and routes (`/models/...`) call the same functions.
"""
