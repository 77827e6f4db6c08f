"""Steps as they ran: traces, causes of lost time, and summaries."""
