"""OpenAI's Responses API, without stored responses and built-in tools."""
