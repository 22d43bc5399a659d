"""The figures of the report and of the dashboard, as plain plotly data with a summary sentence and a table each."""
