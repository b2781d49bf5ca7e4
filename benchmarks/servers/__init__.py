"""Server processes that benchmarks start and measure: servers of rivals, and Hundredfold."""
