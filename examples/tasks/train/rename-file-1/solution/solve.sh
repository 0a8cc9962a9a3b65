#!/bin/bash
mv drink.txt garden.txt
