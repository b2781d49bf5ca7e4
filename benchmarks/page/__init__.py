"""What a person notices of the page: first paint, moving layout, memory of a long visit."""
