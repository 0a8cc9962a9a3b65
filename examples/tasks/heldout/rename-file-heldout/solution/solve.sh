#!/bin/bash
mv hat.txt plate.txt
