"""ultralytics https://docs.ultralytics.com/quickstart/"""

import numpy
from PIL import Image
from pathlib import Path
from ultralytics import YOLO

for kind in ("train", "val"):
    for folder in ("images", "labels"):
        Path(f"data/{kind}/{folder}").mkdir(parents=True, exist_ok=True)
    for number in range(4):
        Image.fromarray(numpy.random.randint(0, 255, (64, 64, 3), dtype=numpy.uint8)).save(f"data/{kind}/images/{number}.png")
        Path(f"data/{kind}/labels/{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
Path("data.yaml").write_text(f"path: {Path('data').resolve()}\ntrain: train/images\nval: val/images\nnames: {{0: thing}}\n")
model = YOLO("yolov8n.yaml")
results = model.train(data="data.yaml", epochs=1, imgsz=64, batch=2, workers=0, device="cpu", plots=False, verbose=False)
metrics = model.val(data="data.yaml", imgsz=64, workers=0, device="cpu", plots=False)
found = model(numpy.zeros((64, 64, 3), dtype=numpy.uint8), imgsz=64, verbose=False)
