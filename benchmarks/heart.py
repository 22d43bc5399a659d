"""Four hospitals: FLamby's results on Fed-Heart-Disease reproduced, and personalized methods beside them.

python benchmarks/heart.py data FOLDER   # write the CSV file of the package from the publisher's files in FOLDER
python benchmarks/heart.py flamby        # FLamby's eight rows with its settings, split, and initial weights
python benchmarks/heart.py personal      # personalized methods on ten splits of our own, settings from validation data
python benchmarks/heart.py show          # print the tables of docs/heart.md

The results are in benchmarks/results/heart.json. On two cores, `flamby` takes a minute and `personal` a quarter of an hour.
"""
