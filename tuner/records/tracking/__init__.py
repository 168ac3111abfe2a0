"""MLflow: the journal on disk is the queue, a background thread sends from it, and what was sent is never sent twice.

One parent run a study, one child run a trial. Tracking trouble never stops or slows a trial: the journal holds
everything that MLflow would, and a cursor into it (``mlflow.json``) says what a server has already taken.
"""
